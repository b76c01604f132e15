"""The conditioning paper's numbers on residual networks, by architecture and depth: figure 8, tables 1 and 2."""

from __future__ import annotations

from gyroscope_lab.papers.conditioning.by_depth import Network

_DEPTHS = (56, 110, 230, 1202)


def _rows(**rows: tuple[tuple[float, float], ...]) -> dict[Network, tuple[float, float]]:
    return {
        Network(architecture, depth): error
        for architecture, errors in rows.items()
        for depth, error in zip(_DEPTHS, errors, strict=True)
    }


#: Table 1: test errors on CIFAR-10 in percent, mean and standard deviation of five seeds.
CIFAR_10 = _rows(
    ResNet=((7.52, 0.30), (6.89, 0.52), (7.35, 0.64), (9.42, 3.10)),
    PreResNet=((6.89, 0.09), (6.25, 0.08), (6.12, 0.21), (6.07, 0.10)),
    PreResNet_v1=((6.75, 0.26), (6.37, 0.24), (6.32, 0.21), (7.89, 0.58)),
    ResNet_LastBN=((6.50, 0.22), (6.10, 0.09), (5.94, 0.18), (5.68, 0.14)),
)
#: Table 2: likewise on CIFAR-100.
CIFAR_100 = _rows(
    ResNet=((29.60, 0.41), (28.3, 1.09), (29.25, 0.44), (30.49, 4.44)),
    PreResNet=((29.29, 0.44), (27.58, 0.12), (26.72, 0.33), (26.23, 0.26)),
    PreResNet_v1=((29.60, 0.21), (28.54, 0.26), (27.92, 0.34), (30.07, 2.04)),
    ResNet_LastBN=((28.82, 0.38), (27.05, 0.23), (25.80, 0.10), (25.51, 0.27)),
)
#: Section 5.1: on CIFAR-10, by weight decay, where that of 2·10⁻⁴ goes with twice the iterations.
FURTHER: dict[tuple[Network, float], tuple[float, float]] = {
    (Network("ResNet_LastBN", 1202), 2e-4): (4.79, 0.12),
    (Network("ResNet_LastBN", 2402), 1e-4): (5.04, 0.30),
}
#: Section 5.1: training losses at the end of figure 8.
LAST_LOSS = {Network("ResNet", 56): 0.081, Network("ResNet_LastBN", 56): 0.043}
