"""The chapter on training dynamics: its figures and claims, each shown or not."""
