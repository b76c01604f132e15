"""The conditioning paper: exact spectra of small networks, and layers of deep ones while they are trained."""
