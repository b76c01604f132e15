"""The commands of the laboratory, which join `gyroscope`: demo, reproduce, train and data."""
