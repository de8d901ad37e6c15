"""The modules on which the training path and the diagnosis stand: checks, texts, trees, mapped axes and jaxprs."""
