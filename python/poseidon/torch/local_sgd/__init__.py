"""Local SGD and DiLoCo: workers train alone for some steps, then their parameters are averaged on the servers."""
