"""Tables as pure functions of the records under results/."""
