"""Charts as SVG text: bars, lines and flame graphs. May import `bench.harness`."""
