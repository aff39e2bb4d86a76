"""What the help of the command line says: of all commands, and of each one."""

DESCRIPTION = """\
Train, test and resume experiments, each described by one YAML file.

  jax-trainer init my_project --task image                         create a project that trains at once
  jax-trainer train digits                                         train, then test the best checkpoint
  jax-trainer train digits trainer.train_epochs=3                  override a value of the file
  jax-trainer train mine.yaml my_models.py                         import your own classes
  jax-trainer train digits resume=auto                             resume the run, or start it
  jax-trainer check digits                                         dry run: build all, trace one step
  jax-trainer check digits --compile --find-batch                  does it fit, how long will it take?
  jax-trainer lr-find digits --plot curve.svg                      which learning rate?
  jax-trainer test runs/CNN/20261115-142311                        evaluate the best checkpoint
  jax-trainer eval runs/CNN/20261115-142311 --follow               evaluate each checkpoint of a running training
  jax-trainer resume runs/CNN/20261115-142311                      resume from the latest checkpoint
  jax-trainer predict runs/CNN/20261115-142311 -o predictions.jsonl
                                                                   predictions for the test set, as a file
  jax-trainer export runs/CNN/20261115-142311 --to stablehlo,safetensors -o digits
                                                                   a program that runs without this library
  jax-trainer ckpt runs/CNN/20261115-142311 --verify               list and verify the checkpoints
  jax-trainer time runs/CNN/20261115-142311                        show where the time went
  jax-trainer report runs/CNN/20261115-142311 -o report.html       show runs as one HTML page
  jax-trainer tune digits --space digits --trials 20               search hyperparameters
  jax-trainer cv digits --folds 5                                  k-fold cross-validation
  jax-trainer import gpt2/ -o base                                 pretrained weights, to start a training from
  jax-trainer launch --processes-per-node 2 digits                 train in two processes
  jax-trainer runs --sort val/acc                                  list all runs, the best first
  jax-trainer diff runs/CNN/20261115-142311 runs/CNN/20261116-091502
                                                                   compare two runs
  jax-trainer describe                                             list all classes
  jax-trainer describe AdamW                                       show the keys of a class
"""
EXIT_CODES = """\
exit codes: 0 success, 1 failure, 2 invalid configuration or command line, 75 another process was lost, or a hang
detected (HangMonitor): the same command resumes, 130 Ctrl-C, 143 SIGTERM
"""


SUMMARIES = {  # in the order of the list of commands
    "init": "create a project that trains at once",
    "train": "train the experiment of a YAML file, then test it",
    "check": "dry run: validate a configuration, show parameters, shapes and classes",
    "lr-find": "sweep the learning rate over a few steps, and suggest one",
    "test": "evaluate a checkpoint of a run on the test set",
    "eval": "evaluate the checkpoints of a run, also while it is training",
    "resume": "resume a run from a checkpoint",
    "predict": "write the predictions of a checkpoint of a run to a file",
    "export": "write a checkpoint of a run as StableHLO, safetensors or for transformers",
    "ckpt": "list and verify the checkpoints of a run",
    "time": "show where the time of a run went, and what to change",
    "runs": "list the runs below a folder, with status and metrics",
    "diff": "compare two runs",
    "report": "show one or several runs as one HTML page",
    "describe": "list the classes that a file can name, and their keys",
    "schema": "print the JSON Schema of configuration files, for editors",
    "import": "write pretrained weights as a run folder, to start from",
    "launch": "train in several processes, on this machine or on Ray, SLURM or Kubernetes",
    "cv": "k-fold cross-validation of an experiment",
    "tune": "search hyperparameters with Optuna",
}
DESCRIPTIONS = {
    "init": """\
Create a project that trains at once: a package with a model, a dataset and a loss, its configuration, and a test.

PROJECT is a new folder, and the name of the package. After `pip install -e .` there, `jax-trainer` imports it, so its
classes can be named in files.""",
    "train": """\
Train the experiment of a YAML file, then test the checkpoint with the best validation metric.

Without CONFIG, list the ready configurations of the package, which are trained by name: `jax-trainer train digits`.
With `resume=auto`, continue the newest run that computes the same, also to another length, or start a new one.""",
    "check": """\
Validate a configuration without training: load the data, build the model and the optimizer, and trace one step.

Reports all configuration errors at once, or the parameters, shapes, FLOPs and classes. With --compile, the step is
compiled as well, but not run: memory, FLOPs and estimated time; exit code 1 if it does not fit. Writes no files.""",
    "lr-find": """\
Sweep the learning rate of an experiment over a few steps, and suggest one: where the loss falls most steeply.

Nothing is written but the figure of --plot. The exit code is 1 if the losses are too noisy or too flat.""",
    "test": """\
Evaluate a checkpoint of a run on the test set of its dataset; by default the best checkpoint.

The stored configuration of the run is used; overrides (KEY=VALUE) change it for this evaluation only.""",
    "eval": """\
Evaluate the checkpoints of a run on its validation set and its `eval_sets`, each once: the results are in the file
evaluations.jsonl of the run folder, and what is in there is not evaluated again.

With --follow, evaluate those that a running training saves, until it has ended. The training neither sees nor waits for
it; a checkpoint that its retention deletes before it is read is recorded as deleted. Overrides (KEY=VALUE) change the
stored configuration for this evaluation only. `jax-trainer test` evaluates one checkpoint, and writes nothing.""",
    "resume": """\
Resume a run from one of its checkpoints, until the limits of its configuration.

Overrides (KEY=VALUE) apply from there on, such as trainer.train_epochs=30 to train longer. One that changes what is
computed needs allow_changes=PART: program, optimizer, callbacks, start or data.""",
    "predict": """\
Write the predictions of a checkpoint of a run for a split of its dataset to a file; by default the best checkpoint.

  jax-trainer predict runs/CNN/20261115-142311 -o predictions.parquet --targets
  jax-trainer predict runs/CNN/20261115-142311 -o new.jsonl dataset.data_dir=new/

Each row has the id of the example, or its index in the split, and the outputs of the model. Overrides (KEY=VALUE)
change the dataset. Rows are written while they are computed; if the command is killed, the same command continues.""",
    "export": """\
Write a checkpoint of a run in formats that need neither this library nor the code of the run; by default the best one.

  jax-trainer export runs/CNN/20261115-142311 --to stablehlo,safetensors -o digits
  jax-trainer export runs/GPT/20261115-142311 --to hf -o gpt

The transforms of the dataset are a part of the program, and the batch size is free. Each format then predicts 64
examples in a new process that does not import this library; if a difference is beyond the tolerance, the exit code is
1 and nothing is written.""",
    "ckpt": """\
List the checkpoints of a run: metrics, size on disk, and whether they are complete.

Without --verify only names and sizes are checked; with it, every byte is compared with its digest.""",
    "time": """\
Show where the time of a run went, over all of its starts: seconds per phase, what was repeated after a failure, and
what to change.""",
    "runs": """\
List the runs below a folder: status, age, duration, steps, and the best and last values of what they monitor.

A column is run, status, age, duration, epoch, step, created, starts, host, commit, parameters, reason, a metric
(val/acc: its best value; last:val/acc, min:val/acc, max:val/acc), or a key of the configuration (model.class_name).
A run is killed if it has no end and no process holds its lock. What was read is cached in a hidden file there.""",
    "diff": """\
Compare two runs: configuration, code, packages, machine, data, the first row of metrics that differs, and last values.

The exit code is that of `diff`: 0 if configuration and metrics are equal, 1 if they differ, 2 if a run cannot be read.
Measured times are not compared; differences of code, packages, machine and data do not change the exit code.""",
    "report": """\
Write one HTML page about one or several runs: curves, results, configuration and what differs, time, checkpoints.

The page is one file and needs no network. Curves can be zoomed and smoothed; tables work without JavaScript.""",
    "describe": """\
Show a class that a configuration can name, with its keys; without NAME, an index of all classes.

Your own classes are listed if their files are imported: `jax-trainer describe MyModel my_models.py`.""",
    "schema": """\
Print the JSON Schema of configuration files, for validation and completion in editors.

It contains your own classes if their files are imported: `jax-trainer schema --import my_models.py`.""",
    "launch": """\
Start the processes that train one experiment together, each running `train`: on this machine, or on an engine.

  jax-trainer launch --processes-per-node 2 digits
  jax-trainer launch --on slurm --nodes 4 --processes-per-node 8 --time 12h --restarts 20 gpt2

The primary process writes the run folder, and its output is shown unchanged; lines of the other processes start
with their index. Ctrl-C or SIGTERM stops all processes at the same step, with one checkpoint.""",
    "import": """\
Write pretrained weights as a run folder: safetensors files with a `config.json`, as of the Hugging Face Hub.

A training starts from them with `init_from: FOLDER` in its `trainer` section. The mapping from tensors to arrays is
chosen by the `model_type` of `config.json`, or passed: a name or a YAML file. Every tensor must have its place.""",
    "cv": """\
Cross-validate an experiment: one run per fold, validated on its part of the training and validation data.

Every fold is tested on the test data, too. Run the command again to resume: folds that have ended are not trained
again, and one that was killed resumes from its latest checkpoint. The data must be in memory.""",
    "tune": """\
Search hyperparameters with Optuna. Run the command again to resume the study with the missing trials.

With --on ray or --on slurm, --workers processes share the trials; a lost or preempted one loses and doubles none.
With --on slurm --print, the script of an array is printed for sbatch, and nothing starts.""",
}

_RUN = "runs/CNN/20261115-142311"
EXAMPLES = {  # two of each command, which end its help
    "init": ("init my_project --task image", "init my_project --task own --style fit"),
    "train": ("train digits trainer.train_epochs=3", "train mine.yaml my_models.py resume=auto"),
    "check": ("check digits", "check mine.yaml --compile --find-batch --memory 80GB"),
    "lr-find": ("lr-find digits", "lr-find mine.yaml --plot curve.svg --max-lr 0.1"),
    "test": (f"test {_RUN}", f"test {_RUN} --which latest dataset.global_batch_size=256"),
    "eval": (f"eval {_RUN} --follow", f"eval {_RUN} --sets val,test dataset.global_batch_size=256"),
    "predict": (f"predict {_RUN} -o predictions.jsonl", f"predict {_RUN} -o val.npz --split val --targets"),
    "export": (f"export {_RUN} -o digits", f"export {_RUN} --to stablehlo,safetensors -o digits"),
    "cv": ("cv digits", "cv mine.yaml --folds 10 --seed 1 trainer.train_epochs=3"),
    "resume": (f"resume {_RUN}", f"resume {_RUN} --fork trainer.train_epochs=30"),
    "ckpt": (f"ckpt {_RUN}", f"ckpt {_RUN} --verify"),
    "time": (f"time {_RUN}", f"time {_RUN} --json"),
    "runs": ("runs --sort val/acc", "runs --where model.class_name=CNN --columns run,val/acc,model.hidden"),
    "diff": (f"diff {_RUN} runs/CNN/20261116-091502", f"diff {_RUN} runs/CNN/20261116-091502 --json"),
    "report": (f"report {_RUN}", f"report {_RUN} runs/CNN/20261116-091502 -o comparison.html"),
    "describe": ("describe", "describe AdamW"),
    "schema": ("schema", "schema --import my_models.py"),
    "import": ("import gpt2/ -o base", "import bert/ -o base --mapping mine.yaml model.dropout=0.1"),
    "launch": ("launch --processes-per-node 2 digits", "launch --on slurm --nodes 2 --time 4h mine.yaml resume=auto"),
    "tune": (
        "tune digits --space digits --trials 20",
        "tune mine.yaml --space space.yaml --on slurm --workers 8 --time 4h --restarts 2",
    ),
}
