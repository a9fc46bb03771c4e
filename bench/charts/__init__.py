"""Charts as SVG text: lines and flame graphs. May import `bench.harness`."""
