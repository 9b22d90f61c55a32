"""TOSA operators as OpenVINO nodes. Importing the package registers every operator's row; the order does not matter."""

from virtaccel.backend_openvino.lowering import cast as cast
from virtaccel.backend_openvino.lowering import compare as compare
from virtaccel.backend_openvino.lowering import control as control
from virtaccel.backend_openvino.lowering import convolution as convolution
from virtaccel.backend_openvino.lowering import data as data
from virtaccel.backend_openvino.lowering import elementwise as elementwise
from virtaccel.backend_openvino.lowering import integer as integer
from virtaccel.backend_openvino.lowering import integer_convolution as integer_convolution
from virtaccel.backend_openvino.lowering import reduce as reduce
from virtaccel.backend_openvino.lowering import rescale as rescale
from virtaccel.backend_openvino.lowering import resize as resize
from virtaccel.backend_openvino.lowering import spectral as spectral
