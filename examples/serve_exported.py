"""An exported model over HTTP: one request at a time, and no body larger than the model can use.

    jax-trainer export RUN -o digits
    pip install starlette uvicorn
    python examples/serve_exported.py digits --port 8000
    curl localhost:8000/predict -d '{"inputs": [[[0, 5, …], …]]}'

Made for trying a model, and to be changed: it listens on this machine only, without authentication or TLS, and does not
join requests to batches. docs/how-to/serve-a-model.md names what does.
"""
# Expected: it answers after 1 to 3 s on two CPU cores, until Ctrl-C.

import argparse
import asyncio
import json
import math
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jax_trainer.tools.exporting import ArraySpec, ExportedModel, load_export

NUMBER = 32  # bytes of a number in JSON: up to 24 of its digits, a comma, a space, and brackets
NAMES = 1024  # bytes of a body beside its numbers
CONNECTIONS = 32  # each may hold one body; more are answered with 503


def read_array(values: Any, spec: ArraySpec) -> np.ndarray:
    """The array of one input; everything that is wrong with it is answered with 400."""
    try:
        found = np.asarray(values)
    except ValueError:
        raise HTTPException(400, f"{spec.name} is ragged. Expected {spec}.") from None
    if found.dtype.kind not in "biuf":  # numpy would read a number from a text
        raise HTTPException(400, f"{spec.name} has values that are no numbers. Expected {spec}.")
    if found.ndim != len(spec.shape) or found.shape[1:] != spec.row:
        raise HTTPException(400, f"{spec.name} has the shape {list(found.shape)}. Expected {spec}.")
    with np.errstate(over="ignore", invalid="ignore"):
        array = found.astype(spec.dtype)
    is_kept = array == found if array.dtype.kind in "biu" else np.isfinite(array)
    if not is_kept.all():
        raise HTTPException(400, f"{spec.name} has the value {found[~is_kept][0]}. Expected {spec}.")
    return array


def read_inputs(body: bytes, model: ExportedModel, size: int) -> tuple[dict[str, np.ndarray], int]:
    """The inputs of a request, repeated to fill `size` examples, and how many it has."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The body is not JSON: {error}.") from None
    if not isinstance(content, dict) or "inputs" not in content:
        raise HTTPException(400, 'The body must be a JSON object with the key "inputs".')
    given, names = content["inputs"], [spec.name for spec in model.inputs]
    by_name = given if isinstance(given, dict) else {names[0]: given}
    if by_name.keys() != set(names):
        raise HTTPException(400, f'"inputs" must have {", ".join(names)}; found {", ".join(by_name)[:200] or "none"}.')
    arrays = {spec.name: read_array(by_name[spec.name], spec) for spec in model.inputs}
    count, *others = {len(array) for array in arrays.values()}
    if others or not 1 <= count <= size:
        raise HTTPException(400, f"Every input must have the same number of examples, from 1 to {size}.")
    return {name: np.resize(array, (size, *array.shape[1:])) for name, array in arrays.items()}, count


def predict(body: bytes, model: ExportedModel, size: int) -> dict[str, Any]:
    """The answer to a request. All have the same batch size, so the program is compiled once."""
    inputs, count = read_inputs(body, model, size)
    found = model(**inputs)
    outputs = found if isinstance(found, dict) else {model.outputs[0].name: found}
    rows = {name: np.asarray(array)[:count] for name, array in outputs.items()}
    if odd := [name for name, array in rows.items() if not np.isfinite(array).all()]:
        raise HTTPException(500, f"The model returned values of {odd[0]} that are not finite, which JSON cannot have.")
    plain = {name: array.astype(np.float32) if array.dtype.kind == "V" else array for name, array in rows.items()}
    return {"outputs": {name: array.tolist() for name, array in plain.items()}}  # V: bfloat16


def app(model: ExportedModel, max_batch: int) -> Starlette:
    """The paths of the server."""
    size = max_batch if model.batch is None else model.batch
    limit = NAMES + NUMBER * size * sum(math.prod(spec.row) for spec in model.inputs)
    lock = asyncio.Lock()  # reading a body, too, takes memory: one at a time
    facts = {name: model.manifest.get(name) for name in ("model", "inputs", "outputs", "classes", "source")}

    async def answer(request: Request) -> JSONResponse:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise HTTPException(413, f"The body has more than {limit} bytes, enough for {size} examples. Split it.")
        async with lock:
            return JSONResponse(await asyncio.to_thread(predict, bytes(body), model, size))

    async def describe(request: Request) -> JSONResponse:
        return JSONResponse({**facts, "max_batch": size, "max_body": limit})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "alive"})

    async def explain(request: Request, error: Any) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code)

    model(**{spec.name: np.zeros((size, *spec.row), spec.dtype) for spec in model.inputs})  # compiles
    routes = [Route("/predict", answer, methods=["POST"]), Route("/model", describe), Route("/health", health)]
    return Starlette(routes=routes, exception_handlers={HTTPException: explain})


def main(folder: str, port: int = 8000, max_batch: int = 16) -> None:
    """Answers requests, until Ctrl-C."""
    model = load_export(folder)
    first = "batch" if model.batch is None else model.batch
    arrays = (*model.inputs, *model.outputs)
    if odd := [spec for spec in arrays if spec.shape[:1] != (first,) or "batch" in spec.shape[1:]]:
        raise SystemExit(f"{odd[0]} has not one row per example, so a request cannot be filled to a batch.")
    if max_batch < 1:
        raise SystemExit(f"--max-batch must be at least 1, got {max_batch}.")
    uvicorn.run(app(model, max_batch), host="127.0.0.1", port=port, limit_concurrency=CONNECTIONS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answers requests for the predictions of an exported model.")
    parser.add_argument("folder", help="folder that `jax-trainer export` has written, with stablehlo")
    parser.add_argument("--port", type=int, default=8000, help="port; 0: a free one (default: 8000)")
    parser.add_argument("--max-batch", type=int, default=16, help="examples per request (default: 16)")
    main(**vars(parser.parse_args()))
