"""Tables: rows of numbers under int64 ids, kept by servers, changed by row rules."""
