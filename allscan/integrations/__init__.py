"""All-Scan inside other people's models; each module needs the package that it is named after."""
