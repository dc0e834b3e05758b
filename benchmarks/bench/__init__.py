"""What the benchmarks share: subjects, offloaders, a clock, tables and plots."""
