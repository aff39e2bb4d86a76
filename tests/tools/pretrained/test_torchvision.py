"""ResNets with the names of torchvision and timm, against one of torch with these names."""

from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jax_trainer.models import ResNetConfig
from jax_trainer.models.cnn import BLOCKS
from jax_trainer.models.pretrained import PretrainedError
from jax_trainer.tools.pretrained import export_pretrained, load_pretrained

X = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
WIDTH, CLASSES = 4, 5
torch: Any = pytest.importorskip("torch", reason="`make integrations` installs torch")
nn, safetensors_torch = torch.nn, pytest.importorskip("safetensors.torch")


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Any:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class Block(nn.Module):
    """A residual block; `conv1` to `conv3` with `bn1` to `bn3`, and `downsample` where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int, *, is_bottleneck: bool) -> None:
        super().__init__()
        sizes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if is_bottleneck:
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        for number, size in enumerate(sizes, 1):
            setattr(self, f"conv{number}", convolution(*size))
            setattr(self, f"bn{number}", nn.BatchNorm2d(size[1]))
        self.count, outputs = len(sizes), sizes[-1][1]
        fits = stride == 1 and inputs == outputs
        self.downsample = (
            None if fits else nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Any) -> Any:
        added = x
        for number in range(1, self.count + 1):
            added = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(added))
            added = torch.relu(added) if number < self.count else added
        return torch.relu(added + (x if self.downsample is None else self.downsample(x)))


class TorchResNet(nn.Module):
    def __init__(self, depth: Any) -> None:
        super().__init__()
        is_bottleneck = depth >= 50
        self.conv1, self.bn1 = nn.Conv2d(3, WIDTH, 7, 2, 3, bias=False), nn.BatchNorm2d(WIDTH)
        inputs = WIDTH
        for stage, count in enumerate(BLOCKS[depth]):
            blocks = []
            for number in range(count):
                width, stride = WIDTH * 2**stage, 2 if stage and not number else 1
                blocks.append(Block(inputs, width, stride, is_bottleneck=is_bottleneck))
                inputs = width * (4 if is_bottleneck else 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, CLASSES)

    def forward(self, x: Any) -> Any:
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


def made(depth: int) -> TorchResNet:
    torch.manual_seed(0)
    model = TorchResNet(depth).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "running" in name or ("bn" in name and "weight" in name):
                value.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize(("depth", "tensors"), [(18, 122), pytest.param(50, 320, marks=pytest.mark.slow)])
def test_an_imported_resnet_has_the_logits_and_the_names_of_torch(depth: Any, tensors: int, tmp_path):
    theirs = made(depth)
    state = theirs.state_dict()
    assert len(state) == tensors  # as many as torchvision's
    safetensors_torch.save_file(state, tmp_path / "model.safetensors")
    config = ResNetConfig(depth=depth, stem="imagenet", width=WIDTH, num_classes=CLASSES)
    ours = load_pretrained(config, tmp_path, "torchvision_resnet", example=X)
    found = nnx.jit(lambda model, x: model(x))(ours, X)
    with torch.no_grad():
        expected = theirs(torch.tensor(X.transpose(0, 3, 1, 2))).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=1e-5)
    out = export_pretrained(ours, tmp_path / "out", "torchvision_resnet")
    written = {name: torch.tensor(value) for name, value in load_file(out / "model.safetensors").items()}
    other = TorchResNet(depth)
    other.load_state_dict(written, strict=True)
    assert all((other.state_dict()[name] == value).all() for name, value in state.items())


@pytest.mark.parametrize(
    ("stored", "depth", "words"),
    [
        (18, 34, r"blocks\.2\.convolutions\.0\.norm\.mean.*layer1\.2\.bn1\.running_mean"),
        (34, 18, r"layer1\.2\.bn1\.bias float32\[4\]: the model has not so many"),
    ],
)
def test_another_depth_lists_what_it_lacks(stored: int, depth: Any, words: str, tmp_path):
    safetensors_torch.save_file(made(stored).state_dict(), tmp_path / "model.safetensors")
    config = ResNetConfig(depth=depth, stem="imagenet", width=WIDTH, num_classes=CLASSES)
    with pytest.raises(PretrainedError, match=words):
        load_pretrained(config, tmp_path, "torchvision_resnet", example=X)
