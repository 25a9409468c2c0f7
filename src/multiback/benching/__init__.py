"""Problems, questions and the runner behind `multiback bench`."""
