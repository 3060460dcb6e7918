"""Tables as functions of the records under results/ as text, Markdown, CSV and LaTeX; the papers' with ours."""
