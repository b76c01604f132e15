"""The theory of training as code: normalization, effective learning rates, weight decay.

After Grosse's chapter on adaptive gradient methods, normalization and weight decay; see docs/dynamics.md.
"""

from typing import TYPE_CHECKING

from gyroscope.base.lazy import lazy
from gyroscope.errors import DynamicsError

if TYPE_CHECKING:
    from gyroscope.theory import adaptive, batch_norm, decay, least_squares
    from gyroscope.theory.batch_norm import BatchCenter, batch_center_paths, batch_norm_paths
    from gyroscope.theory.effective_rate import (
        Growth,
        Law,
        decay_law,
        decay_time,
        effective_lr,
        figure6,
        fit_norms,
        implicit_decay,
        norm_growth,
    )
    from gyroscope.theory.empirical_fisher import (
        batch_law,
        fisher_diagonal,
        per_example_gradients,
        second_moment,
        step_gain,
    )
    from gyroscope.theory.equilibrium import (
        Equilibrium,
        Schedules,
        equilibrium,
        figure7,
        fixed_point,
        norm_squares,
        rate_at_rest,
    )
    from gyroscope.theory.exponential import ExponentialRates, exponential_rates, shrinkage, undo_decay
    from gyroscope.theory.invariance import invariance
    from gyroscope.theory.invariance_result import Invariance
    from gyroscope.theory.jacobian import estimated_jacobian_norm, gauss_newton_norm, jacobian_norm
    from gyroscope.theory.knockout import Knockout, knock_out, restore
    from gyroscope.theory.least_squares import figure2
    from gyroscope.theory.moment_variance import (
        Percentiles,
        optimizer_shares,
        recorded_shares,
        share_between,
        spans,
        variance_shares,
    )
    from gyroscope.theory.normalizers import comparison, properties
    from gyroscope.theory.reparameterize import Affine, reparameterize, standardizing

__all__ = [
    "Affine",
    "BatchCenter",
    "DynamicsError",
    "Equilibrium",
    "ExponentialRates",
    "Growth",
    "Invariance",
    "Knockout",
    "Law",
    "Percentiles",
    "Schedules",
    "adaptive",
    "batch_center_paths",
    "batch_law",
    "batch_norm",
    "batch_norm_paths",
    "comparison",
    "decay",
    "decay_law",
    "decay_time",
    "effective_lr",
    "equilibrium",
    "estimated_jacobian_norm",
    "exponential_rates",
    "figure2",
    "figure6",
    "figure7",
    "fisher_diagonal",
    "fit_norms",
    "fixed_point",
    "gauss_newton_norm",
    "implicit_decay",
    "invariance",
    "jacobian_norm",
    "knock_out",
    "least_squares",
    "norm_growth",
    "norm_squares",
    "optimizer_shares",
    "per_example_gradients",
    "properties",
    "rate_at_rest",
    "recorded_shares",
    "reparameterize",
    "restore",
    "second_moment",
    "share_between",
    "shrinkage",
    "spans",
    "standardizing",
    "step_gain",
    "undo_decay",
    "variance_shares",
]

if not TYPE_CHECKING:  # a type checker reports names that are not listed above
    __getattr__ = lazy(
        __name__,
        {
            "batch_norm": "BatchCenter batch_center_paths batch_norm_paths",
            "effective_rate": "Growth Law decay_law decay_time effective_lr figure6 fit_norms implicit_decay "
            "norm_growth",
            "empirical_fisher": "batch_law fisher_diagonal per_example_gradients second_moment step_gain",
            "equilibrium": "Equilibrium Schedules equilibrium figure7 fixed_point norm_squares rate_at_rest",
            "exponential": "ExponentialRates exponential_rates shrinkage undo_decay",
            "invariance": "invariance",
            "invariance_result": "Invariance",
            "jacobian": "estimated_jacobian_norm gauss_newton_norm jacobian_norm",
            "knockout": "Knockout knock_out restore",
            "least_squares": "figure2",
            "moment_variance": "Percentiles optimizer_shares recorded_shares share_between spans variance_shares",
            "normalizers": "comparison properties",
            "reparameterize": "Affine reparameterize standardizing",
        },
    )
