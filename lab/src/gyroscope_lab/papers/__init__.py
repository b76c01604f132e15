"""Studies: the papers' figures made again, one module a paper."""
