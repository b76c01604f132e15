"""Optimizers that give an inner optimizer preconditioned gradients: K-FAC and the quasi-diagonal preconditioner."""
