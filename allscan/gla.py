def zeco_gla(): pass
