"""What users call: request -> survey -> independence -> plan -> answer."""
