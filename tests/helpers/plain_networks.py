"""Networks of other programs, computed with plain functions that create their weights at the first use.

They are written from the papers and from the programs that their docstrings name, and use no code of fastamp.
"""

import torch
import torch.nn.functional as F
from reference_weights import fill

_GAIN = 1.5  # of convolutions, so that the features of two images differ as much as the features of one


class Weights(dict):
    """State dict of a network: each layer, called with its name and sizes, adds its tensors and applies them."""

    def tensor(self, name, *shape, gain=1.0):
        return self.setdefault(name, gain * fill(name, shape))

    def conv(self, x, name, out, kernel=1, stride=1, *, groups=1, bias=False, gain=_GAIN):
        weight = self.tensor(f"{name}.weight", out, x.shape[1] // groups, kernel, kernel, gain=gain)
        offset = self.tensor(f"{name}.bias", out) if bias else None
        return F.conv2d(x, weight, offset, stride, kernel // 2, groups=groups)

    def bn(self, x, name, *, instance=False):
        width = x.shape[1]
        weight, bias = self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width)
        if instance:
            return F.instance_norm(x, None, None, weight, bias)
        mean, var = (self.tensor(f"{name}.running_{key}", width) for key in ("mean", "var"))
        self.setdefault(f"{name}.num_batches_tracked", torch.tensor(1))
        return F.batch_norm(x, mean, var, weight, bias)

    def linear(self, x, name, out, *, bias=True):
        weight = self.tensor(f"{name}.weight", out, x.shape[1])
        return F.linear(x, weight, self.tensor(f"{name}.bias", out) if bias else None)


def osnet(w, x, width, kind=""):
    """OSNet of torchreid (osnet.py, osnet_ain.py): kind "", "ibn" or "ain"; 512-wide feature."""
    widths = [int(channels * width) for channels in (64, 256, 384, 512)]
    ain = kind == "ain"

    def unit(x, name, out, kernel=1, stride=1, *, relu=True, instance=False, norm=True):
        x = w.conv(x, f"{name}.conv", out, kernel, stride)
        x = w.bn(x, f"{name}.bn", instance=instance) if norm else x
        return x.relu() if relu else x

    def light(x, name):
        x = w.conv(w.conv(x, f"{name}.conv1", x.shape[1]), f"{name}.conv2", x.shape[1], 3, groups=x.shape[1])
        return w.bn(x, f"{name}.bn").relu()

    def block(x, name, out, instance):
        inner = out // 4
        reduced, total = unit(x, f"{name}.conv1", inner), 0
        for count in range(1, 5):
            y = reduced
            for number in range(count):
                if ain:
                    part = f"conv2.{count - 1}.layers.{number}"
                else:
                    part = f"conv2{'abcd'[count - 1]}" + (f".{number}" if count > 1 else "")
                y = light(y, f"{name}.{part}")
            gate = w.conv(y.mean((2, 3), keepdim=True), f"{name}.gate.fc1", inner // 16, bias=True).relu()
            total = total + y * w.conv(gate, f"{name}.gate.fc2", inner, bias=True).sigmoid()
        y = unit(total, f"{name}.conv3", out, relu=False, norm=not (ain and instance))
        shortcut = unit(x, f"{name}.downsample", out, relu=False) if x.shape[1] != out else x
        if ain:
            y = w.bn(y, f"{name}.IN", instance=True) if instance else y
            return (y + shortcut).relu()
        y = y + shortcut
        return (w.bn(y, f"{name}.IN", instance=True) if instance else y).relu()

    instances = {"": [()] * 3, "ibn": [(0, 1), (), ()], "ain": [(0, 1), (1,), (0,)]}[kind]
    x = F.max_pool2d(unit(x, "conv1", widths[0], 7, 2, instance=bool(kind)), 3, 2, 1)
    for stage in (2, 3, 4):
        for number in (0, 1):
            x = block(x, f"conv{stage}.{number}", widths[stage - 1], number in instances[stage - 2])
        if stage < 4:
            x = F.avg_pool2d(unit(x, f"pool{stage}.0" if ain else f"conv{stage}.2.0", widths[stage - 1]), 2)
    return fc_head(w, unit(x, "conv5", widths[3]).mean((2, 3)))


def fc_head(w, x, width=512):
    """Linear layer, batch norm and ReLU of torchreid."""
    return w.bn(w.linear(x, "fc.0", width), "fc.1").relu()


def resnet50(w, x, prefix="", *, last_stride=1, relu=True, non_local=False, names=("conv1", "bn1", "layer{}")):
    """ResNet-50 (He et al. 2016) with torchvision's padded stem; relu: of the stem; map of 2048 channels."""
    conv1, bn1, layer = (prefix + name for name in names)
    x = w.bn(w.conv(x, conv1, 64, 7, 2), bn1)
    x = F.max_pool2d(x.relu() if relu else x, 3, 2, 1)
    for stage, (count, stride) in enumerate(((3, 1), (4, 2), (6, 2), (3, last_stride)), start=1):
        width = 64 * 2 ** (stage - 1)
        for number in range(count):
            name, step = f"{layer.format(stage)}.{number}", stride if number == 0 else 1
            y = w.bn(w.conv(x, f"{name}.conv1", width), f"{name}.bn1").relu()
            y = w.bn(w.conv(y, f"{name}.conv2", width, 3, step), f"{name}.bn2").relu()
            y = w.bn(w.conv(y, f"{name}.conv3", 4 * width), f"{name}.bn3")
            if number == 0:
                x = w.bn(w.conv(x, f"{name}.downsample.0", 4 * width, 1, step), f"{name}.downsample.1")
            x = (x + y).relu()
            if non_local and number >= count - {2: 2, 3: 3}.get(stage, 0):
                x = non_local_block(w, x, f"{prefix}NL_{stage}.{number - count + {2: 2, 3: 3}[stage]}")
    return x


def non_local_block(w, x, name):
    """Non-local block of AGW (Ye et al. 2021, modeling/layer/non_local.py): one channel inside."""
    theta, phi, g = (w.conv(x, f"{name}.{part}", 1, bias=True, gain=0.1).flatten(2) for part in ("theta", "phi", "g"))
    similarity = theta.transpose(1, 2) @ phi / phi.shape[2]
    y = (similarity @ g.transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])
    return w.bn(w.conv(y, f"{name}.W.0", x.shape[1], bias=True), f"{name}.W.1") + x


def gem(w, x, name, p=3.0):
    """Generalized mean with a learned exponent (Radenovic et al. 2018)."""
    p = w.setdefault(name, torch.tensor([p]))
    return x.clamp(min=1e-6).pow(p).mean((2, 3)).pow(1 / p)


def torchreid_mobilenet(w, x, width):
    """MobileNetV2 of torchreid (mobilenetv2.py): also the first block expands; pooled feature."""

    def unit(x, name, out, kernel=1, stride=1, groups=1):
        return F.relu6(w.bn(w.conv(x, f"{name}.conv", out, kernel, stride, groups=groups), f"{name}.bn"))

    x = unit(x, "conv1", int(32 * width), 3, 2)
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for stage, (expansion, channels, count, stride) in enumerate(stages, start=2):
        for number in range(count):
            name, inner, out = f"conv{stage}.{number}", x.shape[1] * expansion, int(channels * width)
            y = unit(x, f"{name}.conv1", inner)
            y = unit(y, f"{name}.dwconv2", inner, 3, stride if number == 0 else 1, groups=inner)
            y = w.bn(w.conv(y, f"{name}.conv3.0", out), f"{name}.conv3.1")
            x = x + y if y.shape == x.shape else y
    return unit(x, "conv9", int(1280 * width)).mean((2, 3))


def torchreid_shufflenet(w, x, groups=3, widths=(240, 480, 960)):
    """ShuffleNet of torchreid (shufflenet.py; Zhang et al. 2018, table 1); pooled feature."""
    x = F.max_pool2d(w.bn(w.conv(x, "conv1.0", 24, 3, 2), "conv1.1").relu(), 3, 2, 1)
    for stage, (width, count) in enumerate(zip(widths, (4, 8, 4), strict=True), start=2):
        for number in range(count):
            name, first = f"stage{stage}.{number}", number == 0
            y = w.conv(x, f"{name}.conv1", width // 4, groups=1 if (stage, number) == (2, 0) else groups)
            y = w.bn(y, f"{name}.bn1").relu()
            y = torch.cat([y[:, start :: width // 4 // groups] for start in range(width // 4 // groups)], dim=1)
            y = w.bn(w.conv(y, f"{name}.conv2", width // 4, 3, 2 if first else 1, groups=width // 4), f"{name}.bn2")
            out = width - x.shape[1] if first else width
            y = w.bn(w.conv(y, f"{name}.conv3", out, groups=groups), f"{name}.bn3")
            x = (torch.cat((F.avg_pool2d(x, 3, 2, 1), y), dim=1) if first else x + y).relu()
    return x.mean((2, 3))
