"""The colours of the curves in the benchmarks' plots."""

COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#66a182", "#6f4e7c", "#8d8d8d", "#00798c", "#a05195")
