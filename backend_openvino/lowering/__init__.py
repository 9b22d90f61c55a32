"""TOSA operators as OpenVINO nodes. Importing the package registers every operator's row; the order does not matter."""

from virtaccel.backend_openvino.lowering import convolution as convolution
