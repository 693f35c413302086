// The line of Python code that calls a collective, for messages.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "fingerprint.h"

namespace torch_ext::sim {
namespace {

constexpr int kFramesAtMost = 60;

std::string folder_of(const char* package) {
  auto path = pybind11::module_::import(package).attr("__file__").cast<std::string>();
  return path.substr(0, path.rfind('/') + 1);
}

// Whether a frame of `file` is torch's own, or one that the simulator has put between torch and its user.
bool is_between(std::string_view file) {
  // Never freed.
  static const auto* folders = new std::array<std::string, 2>{folder_of("torch"), folder_of("torch_ext.sim")};
  return std::any_of(folders->begin(), folders->end(), [&](const std::string& folder) {
    return file.substr(0, folder.size()) == folder;
  });
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
    } else if (!is_between(file)) {
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
