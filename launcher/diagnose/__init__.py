"""Why a run failed: evidence in, one verdict out (`verdict.diagnose`); the catalogue of faults is data."""
