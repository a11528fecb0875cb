# SPDX-License-Identifier: Apache-2.0
# What the scripts beside this file share; they source it. Nothing happens until a function is called.

# help_if_asked WORD...: if one of the words asks for it, print the comment at the top of the script, and end
help_if_asked() {
  local word
  for word in "$@"; do
    case $word in
      -h | --help)
        sed -n '3,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[1]}"
        exit 0
        ;;
    esac
  done
}
