# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Looking at a run
#
# Every training leaves a folder: its configuration, its metrics, its checkpoints, and where its time went. Nothing here
# needs a server.

# %%
from jax_trainer.runs import TimeReport
from jax_trainer.tools.cli import main
from jax_trainer.trainer import build, load_experiment

trainer = build(load_experiment("digits", ["trainer.train_epochs=4"]).value)
data = trainer.dataset
results = trainer.train_model(data.train_loader, data.val_loader, data.test_loader)
folder = trainer.folder.path
sorted(file.name for file in folder.iterdir())

# %% [markdown]
# ## Metrics
#
# By epoch in the results, and line by line in `metrics.jsonl`.

# %%
{epoch: results[epoch]["val/acc"] for epoch in range(1, 5)}

# %%
results.best

# %% [markdown]
# ## Where the time went

# %%
print(TimeReport.of(folder / "time.jsonl").line)

# %% [markdown]
# ## The best weights again
#
# From the folder alone, in any process.

# %%
loaded = type(trainer).load_from_checkpoint(folder, which="best")
loaded.test_model(data.test_loader)["test/acc"]

# %% [markdown]
# ## All runs below a folder
#
# The same tables as `jax-trainer runs`, `diff` and `report` on the command line.

# %%
main(["runs", "--columns", "run,status,val/acc,epoch"])
