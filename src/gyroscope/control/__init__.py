"""Control: optimizers whose rates mean the same in every network, and preconditioned optimizers."""

from typing import TYPE_CHECKING

from gyroscope.base.lazy import lazy

if TYPE_CHECKING:
    from gyroscope.control import rates
    from gyroscope.control.graft import Graft
    from gyroscope.control.joint import Joint
    from gyroscope.control.layca import Layca, block_normalized, hyperball, lars, relative_update
    from gyroscope.control.preconditioners.kfac import KFAC
    from gyroscope.control.preconditioners.quasi_diagonal import QuasiDiagonal
    from gyroscope.control.renormalize import keep_norms, renormalize_
    from gyroscope.control.sgd_amom import SGD_AMom
    from gyroscope.control.steer import Steered, steer

__all__ = [
    "KFAC",
    "Graft",
    "Joint",
    "Layca",
    "QuasiDiagonal",
    "SGD_AMom",
    "Steered",
    "block_normalized",
    "hyperball",
    "keep_norms",
    "lars",
    "rates",
    "relative_update",
    "renormalize_",
    "steer",
]

if not TYPE_CHECKING:  # for a type checker, a name that is not listed above is a mistake
    __getattr__ = lazy(
        __name__,
        {
            "graft": "Graft",
            "joint": "Joint",
            "layca": "Layca block_normalized hyperball lars relative_update",
            "preconditioners.kfac": "KFAC",
            "preconditioners.quasi_diagonal": "QuasiDiagonal",
            "renormalize": "keep_norms renormalize_",
            "sgd_amom": "SGD_AMom",
            "steer": "Steered steer",
        },
    )
