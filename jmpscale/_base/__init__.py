"""The modules on which the training path and the diagnosis are built: checks, texts, trees, mapped axes and jaxprs."""
