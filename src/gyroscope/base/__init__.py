"""Code that knows nothing about networks: lazy loading, accepted numbers, whole files, transfers."""
