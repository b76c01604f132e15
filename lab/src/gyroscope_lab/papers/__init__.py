"""Studies that reproduce the papers' figures and tables, one folder per paper."""
