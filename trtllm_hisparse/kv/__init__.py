"""Where rows live and how their bytes move: pools, pages, hot cache, tail, optional history, backup."""
