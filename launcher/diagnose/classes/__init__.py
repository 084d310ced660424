"""The catalogue's entries, one module a field: data only. Message formats are the libraries' own."""
