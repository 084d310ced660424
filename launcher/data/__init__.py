"""From files to samples: records, chat templates and labels, sample order. Only `batches.py` needs torch."""
