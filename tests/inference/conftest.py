"""Report of the export tests."""


def pytest_terminal_summary(terminalreporter):
    """Print a table of the differences that test_export_models.py measured."""
    passed = terminalreporter.stats.get("passed", [])
    found = [value for report in passed for name, value in report.user_properties if name == "export"]
    if len(found) < 8:  # most of them are only run with -m export
        return
    columns = [
        f"{suffix} {precision}" for suffix in (".onnx", ".xml", ".pt2", ".ts") for precision in ("float32", "fp16")
    ]
    differences = {(model, column): difference for model, column, difference, _ in found}
    terminalreporter.section("exported features: largest difference from PyTorch")
    terminalreporter.write_line(f"| model | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for model in dict.fromkeys(model for model, *_ in found):
        cells = [differences.get((model, column)) for column in columns]
        cells = ["" if cell is None else f"{cell:.1e}" if cell else "0" for cell in cells]
        terminalreporter.write_line(f"| {model} | {' | '.join(cells)} |")
    terminalreporter.write_line(f"minimum cosine similarity: {min(cosine for *_, cosine in found):.6f}")
