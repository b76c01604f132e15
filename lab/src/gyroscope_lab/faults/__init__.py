"""The benchmark of diagnoses: small networks of every common kind, faults that are put into them, and healthy runs."""
