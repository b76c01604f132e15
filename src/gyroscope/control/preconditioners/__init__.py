"""Optimizers around others that give them preconditioned gradients: K-FAC and the quasi-diagonal preconditioner."""
