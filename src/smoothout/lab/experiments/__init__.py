"""The paper's tables, figures and claims as run configurations, and the queue that carries them out."""
