"""job.yaml: what may be in it (`models`), how it is read (`load`), and whether its inputs are there (`inputs`)."""
