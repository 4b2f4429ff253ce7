"""Fail if the mAP of the last demo evaluation is below 80, or below three times that of the better baseline."""

import json
import sys
from pathlib import Path

BAR = 80.0
rows = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
last = [row for row in rows if "Demo/mAP" in row][-1]
baseline = max(last["Demo/baseline raw pixels/mAP"], last["Demo/baseline color histogram/mAP"])
print(f"demo: mAP {last['Demo/mAP']:.2f}, Rank-1 {last['Demo/Rank-1']:.2f}, better baseline's mAP {baseline:.2f}")
if last["Demo/mAP"] < max(BAR, 3 * baseline):
    sys.exit(f"the demo's mAP is too low: expected at least max({BAR}, 3 x {baseline:.2f}), got {last['Demo/mAP']:.2f}")
