"""Running a user's model without leaving a trace: batches, losses, labels, activations, patches of convolutions."""
