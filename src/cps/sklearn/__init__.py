"""scikit-learn's interface: `from cps.sklearn import ContinualClassifier`."""

from cps.sklearn.classifier import ContinualClassifier as ContinualClassifier
