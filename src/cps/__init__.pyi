# The public names. `cps/__init__.py` reads this file, so it is the only list of them.

from .app.hub import load_from_hub as load_from_hub, push_to_hub as push_to_hub, save_for_hub as save_for_hub
from .closed_form.classifiers import LDA as LDA, NearestMean as NearestMean, Ridge as Ridge
from .closed_form.spaces import (
    Joined as Joined,
    Pretrained as Pretrained,
    RandomPatches as RandomPatches,
    RandomReLU as RandomReLU,
    Space as Space,
)
from .config import LearnerConfig as LearnerConfig
from .data.augmentation import (
    Augmentation as Augmentation,
    Chain as Chain,
    Colour as Colour,
    Flip as Flip,
    PadCrop as PadCrop,
    ResizedCrop as ResizedCrop,
    Rotate as Rotate,
)
from .data.datasets import read_digits as read_digits
from .data.decode import ImageError as ImageError, read_image as read_image
from .data.image_folder import FolderImages as FolderImages, ImageFolder as ImageFolder, read_folder as read_folder
from .data.items import DictDataset as DictDataset
from .data.normalize import Normalize as Normalize
from .data.rotations import RotationScheme as RotationScheme, Rotations as Rotations, Upright as Upright
from .data.tasks import Scenario as Scenario, Task as Task, split_by_class as split_by_class
from .evaluation import metrics as metrics
from .evaluation.evaluator import evaluate as evaluate
from .evaluation.tracker import Tracker as Tracker
from .evaluation.metrics import Evaluation as Evaluation, Metrics as Metrics
from .export.tasks import Export as Export, export_all as export_all, export_task as export_task
from .learner import Learner as Learner
from .loading import BackboneMissing as BackboneMissing, load as load
from .methods.closed_form import ClosedForm as ClosedForm
from .network.architectures import Architecture as Architecture
from .network.backbones import (
    EfficientNetLite0 as EfficientNetLite0,
    SmallConvNet as SmallConvNet,
    resnet18 as resnet18,
    resnet32 as resnet32,
)
from .network.capacity import Capacity as Capacity, CapacityError as CapacityError, CapacityWarning as CapacityWarning
from .network.classifier import Loss as Loss
from .network.compact.extraction import Standalone as Standalone
from .network.masks import Masks as Masks
from .network.outputs import Evidence as Evidence, Outputs as Outputs
from .network.pretrained import load_pretrained as load_pretrained
from .network.shared import SharedNetwork as SharedNetwork
from .network.subnetwork import Fingerprint as Fingerprint, Subnetwork as Subnetwork
from .network.trunk import suggest_trunk as suggest_trunk
from .pruning.base import Pruner as Pruner
from .pruning.magnitude import Magnitude as Magnitude
from .pruning.nnrelief import NNrelief as NNrelief
from .runtime.devices import make_fabric as make_fabric
from .selection.all_tasks import (
    AllTasksModule as AllTasksModule,
    AllTasksOutput as AllTasksOutput,
    ClassScores as ClassScores,
)
from .selection.base import (
    ClassSelector as ClassSelector,
    GraphSelector as GraphSelector,
    GrowingSelector as GrowingSelector,
    HeldOutSelector as HeldOutSelector,
    LazySelector as LazySelector,
    LinkedSelector as LinkedSelector,
    OpenSetSelector as OpenSetSelector,
    Oracle as Oracle,
    PartialClassSelector as PartialClassSelector,
    Selector as Selector,
    ShrinkingSelector as ShrinkingSelector,
)
from .selection.cascade import Cascade as Cascade
from .selection.fusion import Fusion as Fusion
from .selection.importance_signature import ImportanceSignature as ImportanceSignature
from .selection.max_output import MaxOutput as MaxOutput
from .selection.prediction import Prediction as Prediction
from .selection.shared_space import SharedSpace as SharedSpace
from .selection.stream import Stream as Stream
from .storage.container import FileError as FileError
from .storage.settings_codec import setting as setting
from .testing import check_method as check_method, check_pruner as check_pruner, check_selector as check_selector
from .training.losses import (
    Contrastive as Contrastive,
    CrossEntropy as CrossEntropy,
    SmoothedCrossEntropy as SmoothedCrossEntropy,
)
from .training.progress import Progress as Progress, show as show
from .training.settings import (
    Adam as Adam,
    AdamW as AdamW,
    Constant as Constant,
    Cosine as Cosine,
    RAdam as RAdam,
    SGD as SGD,
    Steps as Steps,
    Training as Training,
)

__version__: str
