"""Shows records: render(record) -> text; imports no torch."""
