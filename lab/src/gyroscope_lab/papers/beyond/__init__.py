"""Questions that the papers did not ask, answered with the same instruments."""
