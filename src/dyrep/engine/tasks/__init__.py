"""What is learnt: classes of images, boxes in them, or the class of every pixel."""

from dyrep.engine.recipe import Recipe
from dyrep.engine.tasks.classification import Classification
from dyrep.engine.tasks.detection import Detection
from dyrep.engine.tasks.segmentation import Segmentation
from dyrep.engine.tasks.task import Learnt, Task

__all__ = ["Classification", "Detection", "Learnt", "Segmentation", "Task", "task_of"]

_TASKS: dict[str, type[Classification] | type[Detection] | type[Segmentation]] = {
    kind.name: kind for kind in (Classification, Detection, Segmentation)
}


def task_of(recipe: Recipe) -> Task:
    """What a recipe learns, which follows from its data set.

    Example:
        >>> task_of(Recipe(dataset="digits")).metric
        'accuracy'
    """
    return _TASKS[recipe.task](recipe)
