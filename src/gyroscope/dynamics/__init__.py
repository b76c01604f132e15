"""The theory of training made runnable: normalization, effective learning rates, preconditioning, weight decay."""
