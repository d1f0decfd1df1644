"""DETR-R50 with iRPE on its encoder's keys, as in the iRPE paper's Table 6, on COCO 2017 or images like it.

    whereformer detect train --experiment examples/detr_irpe_coco.py --out runs/detr-irpe-150
    EPOCHS=300 torchrun --nproc-per-node 8 -m whereformer.cli detect train \\
        --experiment examples/detr_irpe_coco.py --out runs/detr-irpe-300

`COCO` is the folder, COCO's own zip files in it if you like; `EPOCHS` 150 or 300, of which the last third has a
tenth of the learning rates.
"""

import os

from whereformer.lab.detect.experiment import paper

experiment = paper(os.environ.get("COCO", "coco"), epochs=int(os.environ.get("EPOCHS", "150")))
