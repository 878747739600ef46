# Compiler options of braid's own targets: warnings, sanitizers.
function(braid_target_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor
                                           -Woverloaded-virtual -Wno-unused-parameter)
  if(BRAID_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(BRAID_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${BRAID_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${BRAID_SANITIZE})
  endif()
endfunction()
