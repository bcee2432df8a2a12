// Python's global lock, without Python's headers: whoever waits for another rank must not hold it.
#pragma once

#include <dlfcn.h>

namespace {

struct WithoutGil {
  WithoutGil() {
    static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (check != nullptr && save != nullptr && check() == 1) state = save();
  }
  ~WithoutGil() {
    static const auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (state != nullptr) restore(state);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  void* state = nullptr;
};

} // namespace
