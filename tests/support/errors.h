// What a call throws, as text.
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

namespace braid::test {

/// What a ValueError that `call` must throw says; fails the test when it throws nothing.
template <class Call>
std::string value_error(Call call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "no ValueError";
  return {};
}

/// What the error that `call` throws says; empty when it throws none.
template <class Error, class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

}  // namespace braid::test
