// The line of Python code that calls a collective, for messages.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <string>

#include "fingerprint.h"

namespace torch_ext::sim {
namespace {

constexpr int kFramesAtMost = 60;

// The folder that torch's own frames come from, with a slash at the end. Never freed.
const std::string& torch_folder() {
  static const auto* folder = [] {
    auto path = pybind11::module_::import("torch").attr("__file__").cast<std::string>();
    return new std::string(path.substr(0, path.rfind('/') + 1));
  }();
  return *folder;
}

} // namespace

std::string site_of_call() {
  if (Py_IsInitialized() == 0) {
    return "";
  }
  pybind11::gil_scoped_acquire gil;
  std::string site;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (int depth = 0; frame != nullptr && depth < kFramesAtMost && site.empty(); ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (file == nullptr) {
      PyErr_Clear();
    } else if (std::strncmp(file, torch_folder().c_str(), torch_folder().size()) != 0) {
      site = std::string(file) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    }
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return site;
}

} // namespace torch_ext::sim
