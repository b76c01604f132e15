"""The layer-rotation papers: figures and tables of both, which share their trainings."""
