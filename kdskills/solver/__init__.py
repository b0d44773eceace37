"""The ReAct loop: pipeline, prompt, dispatch, generators, events, transcript."""
